"""An independent, plain NumPy forward: the second opinion on the wiring of the engine."""
