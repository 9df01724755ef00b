"""Simulated tasks that implement prism.sims.environment. No policy is imported; simulators are imported lazily."""
