"""Lower bounds on the largest load: what no division into groups can go below."""

from collections.abc import Sequence
from itertools import accumulate
from math import fsum


def max_load_bound(costs: Sequence[float], n_groups: int, least: int) -> float:
    """Return a lower bound on the largest load of `n_groups` groups of at least `least` samples.

    The largest of three bounds:

    - the mean load;
    - crowding: of the `j * n_groups + 1` largest samples, `j + 1` share a group, which fills up to
      `least` with the smallest samples at best (`j = 0` is the largest sample and its company);
    - company: the groups of the `j` largest samples hold `j * (least - 1)` others, at best the
      smallest, and one of them carries their mean.

    The sums round as float64 does: exact for integers, else to within some ulps.

    Args:
        costs: Checked costs.
        n_groups: Number of groups.
        least: Fewest samples of a group; `len(costs) / n_groups` for groups of equal size.
    """
    if not costs:
        return 0.0
    rising = sorted(costs)
    smallest = [0.0, *accumulate(rising)]
    n = len(costs)
    bound = fsum(costs) / n_groups
    for j in range((n - 1) // n_groups + 1):
        crowd = fsum(rising[n - 1 - j * n_groups : n - j * n_groups + j])
        bound = max(bound, crowd + smallest[max(0, least - j - 1)])
    largest = 0.0
    for j in range(1, min(n, n_groups) + 1):
        largest += rising[n - j]
        fill = max(0, j * (least - 1))
        # Were fewer groups to hold the j largest, each lost group would take its `least` largest
        # companions away; the mean grows as long as those carry less than the mean itself.
        mean = (largest + smallest[fill]) / j
        if smallest[fill] - smallest[max(0, fill - least)] > mean:
            break
        bound = max(bound, mean)
    return bound
