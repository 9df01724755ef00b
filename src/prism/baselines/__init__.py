"""What PRISM is compared with: other methods on the same encoder, data, normalisation, controller and selection."""
