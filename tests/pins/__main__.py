"""python -m tests.pins [CASE ...]: write the pinned numbers again, after a change that is meant to change them."""

import sys

import safetensors.torch
import torch

from tests.pins.cases import CASES, FOLDER, compute

if __name__ == "__main__":
    torch.set_num_threads(1)
    for case in sys.argv[1:] or CASES:
        path = FOLDER / f"{case}.safetensors"
        safetensors.torch.save_file(compute(case), path)
        print(f"{path}: {path.stat().st_size} bytes")
