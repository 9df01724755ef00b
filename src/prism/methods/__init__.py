"""PRISM and what it is compared with: one file a method, on the same encoder, data, normalisation and controller.

A new method is a file with a config, a policy and a row, `METHOD = Method(config, policy)`, and its line here; or, in a
package of its own, an entry point of the group prism.methods (examples/my_method).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from prism.io.plugins import Table

if TYPE_CHECKING:
    from prism.methods.base import Method

METHODS: Table[Method] = Table(
    "prism.methods",
    "method",
    {
        "prism": "prism.methods.prism:METHOD",
        "diffusion": "prism.methods.diffusion:METHOD",
        "flow_matching": "prism.methods.flow_matching:METHOD",
        "imle": "prism.methods.imle:METHOD",
        "act": "prism.methods.act:METHOD",
        "mse": "prism.methods.regressor:METHOD",
        "rectified_flow": "prism.methods.flow_matching:RECTIFIED",
        "consistency": "prism.methods.consistency:METHOD",
        "consistency_fm": "prism.methods.consistency_fm:METHOD",
        "adaflow": "prism.methods.adaflow:METHOD",
    },
)
