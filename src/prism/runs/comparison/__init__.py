"""Methods x recipes x seeds at equal budgets: `prism compare` (docs/comparison.md).

grid     which cells there are, and where each lives on disk
cell     one of them: train, look on the way, evaluate
worker   the process of a cell
local    processes on this machine; ray_cells: tasks of a Ray cluster
summary  from the files of the cells to means, intervals, tests
page     the HTML page
"""
