"""What several tests share: vectors, tolerances of comparison, real models."""
