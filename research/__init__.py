"""What a reviewer runs: benches and studies behind the figures. From a checkout; not installed, imported by nothing."""
