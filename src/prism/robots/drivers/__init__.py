"""Drivers of real robots and sensors: one file a vendor, put together by a robot's file (composed.py)."""
