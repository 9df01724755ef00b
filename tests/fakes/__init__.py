"""Stand-ins of robots and sensors, as their makers' software behaves: units, blocking, errors."""
