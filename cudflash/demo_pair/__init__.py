"""The embedded pair: three model files, their card and notices. No code."""
