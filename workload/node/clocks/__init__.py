"""GPU clocks and power limits: setting them, reading them back and restoring them."""
