"""Files, configs and processes: what everything else stands on."""
