"""Simulated tasks behind the interface of prism.sims.environment. Never imports a policy; simulators are imported lazily."""
