"""Calibration: XᵀX of every matmul's input (calibrate), rounding with error feedback (quantizer), and what it is worth (evaluate)."""
