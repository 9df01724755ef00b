"""python -m tests.golden: write the streams again, after a change that is meant to change them; say why in the commit.

The folders in files/ were written once, by the commands in commands.json and the commit in figures.json.
"""

import torch

from tests.golden import streams

if __name__ == "__main__":
    torch.set_num_threads(1)
    streams.write()
    print(f"{streams.FILE}: {streams.FILE.stat().st_size} bytes, {len(streams.STREAMS)} streams")
