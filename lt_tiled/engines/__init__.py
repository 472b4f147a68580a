"""What wraps a prepared model, and what tiled modules owe to it."""
