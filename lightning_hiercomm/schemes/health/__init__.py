"""What is not finite; what should be equal and is not."""
