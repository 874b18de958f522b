"""What one runs around training."""
