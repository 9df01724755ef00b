"""Random numbers that belong to rows."""

import pytest
import torch

from prism.rows import EachRandom, PartRandom, Random


def test_rows_of_a_joint_draw_are_the_rows_drawn_alone() -> None:
    joint = EachRandom([Random(seed) for seed in (3, 1, 2)])
    drawn = [joint.randn((3, 4, 5)), joint.rand((3, 2))]
    for row, seed in enumerate((3, 1, 2)):
        alone = torch.Generator().manual_seed(seed)
        assert torch.equal(drawn[0][row : row + 1], torch.randn(1, 4, 5, generator=alone))
        assert torch.equal(drawn[1][row : row + 1], torch.rand(1, 2, generator=alone))


def test_a_row_draws_the_same_numbers_wherever_it_is_computed() -> None:
    whole = Random(5)
    expected = [whole.rand((2, 7), dim=1), whole.randint(9, (2, 14), dim=1), whole.randn((7, 3, 4))]
    for start, stop in ((0, 7), (0, 3), (3, 7), (6, 7)):
        n = stop - start
        rng = PartRandom(5, start, n, 7)
        found = [rng.rand((2, n), dim=1), rng.randint(9, (2, 2 * n), dim=1), rng.randn((n, 3, 4))]
        assert torch.equal(found[0], expected[0][:, start:stop])
        assert torch.equal(found[1], expected[1][:, 2 * start : 2 * stop])
        assert torch.equal(found[2], expected[2][start:stop])


@pytest.mark.parametrize("rng", [Random(0), PartRandom(0, 0, 2, 4), EachRandom([Random(0)])])
def test_a_plain_torch_draw_is_refused(rng: Random) -> None:
    """It would be silently wrong on ranks and for several robots in one batch."""
    with pytest.raises(TypeError):
        torch.randn(2, generator=rng)  # type: ignore[call-overload]


def test_a_draw_for_some_of_the_rows_is_refused() -> None:
    with pytest.raises(ValueError, match="not a multiple of the 4 rows"):
        PartRandom(0, 0, 4, 8).rand((2, 3), dim=1)
