"""Random numbers that belong to rows."""

import torch

from prism.distributed import draws


def test_rows_of_a_joint_draw_are_the_rows_drawn_alone() -> None:
    joint = draws.each_row([torch.Generator().manual_seed(seed) for seed in (3, 1, 2)])
    drawn = [draws.randn((3, 4, 5), joint), draws.rand((3, 2), joint)]
    for row, seed in enumerate((3, 1, 2)):
        alone = torch.Generator().manual_seed(seed)
        assert torch.equal(drawn[0][row : row + 1], torch.randn(1, 4, 5, generator=alone))
        assert torch.equal(drawn[1][row : row + 1], torch.rand(1, 2, generator=alone))
