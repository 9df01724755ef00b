"""The robot's side of a PRISM policy server: `Client` asks for plans, `RecedingHorizon` executes them in time."""

from prism_client.client import Client, ConnectionLostError, ServerError
from prism_client.runtime import RecedingHorizon, Stats

__version__ = "0.1.0"
__all__ = ["Client", "ConnectionLostError", "RecedingHorizon", "ServerError", "Stats"]
