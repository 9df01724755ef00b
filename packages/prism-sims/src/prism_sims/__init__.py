"""Simulated tasks behind the interface of prism.sims.base. Never imports a policy; simulators are imported lazily."""
