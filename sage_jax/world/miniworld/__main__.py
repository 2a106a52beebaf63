"""`python -m sage_jax.world.miniworld --scenarios 180 --seed 0`: builds a mini world and prints its folder."""

from __future__ import annotations

import argparse
import sys

from sage_jax.errors import SageError
from sage_jax.world.miniworld.build import build
from sage_jax.world.roots import DEFAULT_SCENARIOS, SMOKE_SCENARIOS


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m sage_jax.world.miniworld", description=__doc__)
    parser.add_argument("--scenarios", type=int, default=DEFAULT_SCENARIOS, help="over all splits, three tasks each")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--smoke", action="store_true", help=f"{SMOKE_SCENARIOS} scenarios")
    parser.add_argument("--cache", help="cache folder (default SAGE_CACHE, else the user's cache home)")
    args = parser.parse_args()
    try:
        print(build(SMOKE_SCENARIOS if args.smoke else args.scenarios, args.seed, args.cache))
    except (SageError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
