"""The command `evenstep-balance`: would balancing, or packing, help me?

Nothing in `evenstep.balance` imports this package; its dependencies come with the extra `cli`.
"""

from evenstep.balance.cli.entry import main

__all__ = ["main"]
