"""Simulated tasks behind one interface. Never imports a policy; simulators are imported lazily."""
