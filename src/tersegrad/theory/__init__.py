"""The limits: bounds, expected lengths, rate-distortion functions."""
