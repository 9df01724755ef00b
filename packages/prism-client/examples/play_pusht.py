"""Push-T over the network: the simulator here, the policy on a server.

prism train pusht                    # or pusht-human; on the computer with the GPU
prism serve runs/pusht
python pusht.py --episodes 20        # needs prism-policy[sims] for the simulator; a robot needs prism-client alone

Time stands still in a simulator, so the executor waits for each plan (asynchronous=False). Then the actions are those
of `prism eval` on the same seeds, and so is the success.
"""

from __future__ import annotations

import argparse

from prism.sims.task_table import make_env

from prism_client import Executor, RemotePlanner


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--uri", default="ws://127.0.0.1:8000")
    parser.add_argument("--api-key")
    parser.add_argument("--task", default="pusht")
    parser.add_argument("--episodes", type=int, default=20)
    parser.add_argument("--first-seed", type=int, default=100_000)
    options = parser.parse_args()
    env = make_env(options.task)
    successes = 0
    score = 0.0
    with Executor(RemotePlanner(options.uri, api_key=options.api_key), asynchronous=False) as executor:
        for seed in range(options.first_seed, options.first_seed + options.episodes):
            observation = env.reset(seed)
            executor.reset(seed)
            best, success = 0.0, False
            while True:
                result = env.step(executor.act(observation))
                observation = result.observation
                best, success = max(best, result.score), success or result.success
                if result.done:
                    break
            successes += success
            score += best
            print(f"seed {seed}: success {success}, score {best:.3f}, plans {executor.stats.plans}", flush=True)
    env.close()
    print(f"success {successes / options.episodes:.2f}, score {score / options.episodes:.3f}")


if __name__ == "__main__":
    main()
