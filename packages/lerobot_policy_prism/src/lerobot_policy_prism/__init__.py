"""PRISM as a LeRobot policy. LeRobot finds this package by its name: nothing has to be imported by hand."""

from lerobot_policy_prism.configuration_prism import PrismConfig
from lerobot_policy_prism.modeling_prism import PrismPolicy
from lerobot_policy_prism.processor_prism import make_prism_pre_post_processors

__all__ = ["PrismConfig", "PrismPolicy", "make_prism_pre_post_processors"]
