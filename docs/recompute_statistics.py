"""Recompute a study's statistics from its records, as ``docs/statistical-methods.md`` does.

    python docs/recompute_statistics.py outputs/reference/seq_map.zip

prints, for every row and arm, the numbers that ``cell.json`` has. An argument is the archive of a
study or the folder of a cell. The script needs NumPy and SciPy
and shares no code with labkit, so it checks the page and the package against each other
(``tests/docs/test_recompute_statistics.py``). It does not check gates, it assumes a complete
study, and it leaves out rows with a value of 0.
"""

import json
import math
import sys
import tarfile
import tempfile
import zipfile
from itertools import combinations
from pathlib import Path

import numpy as np
from scipy.special import gammaln, stdtr, stdtrit

CELL_SUFFIX = ".tar.xz"  # a cell in the archive of a study
ENUMERATED, DRAWN, SEED = 300_000, 100_000, 20_260_612


def read_json(path):
    """Return the content of a JSON file."""
    return json.loads(path.read_text(encoding="utf-8"))


def median(values):
    """Return the median; of an even count, the geometric mean of the middle two."""
    ordered, half = sorted(values), len(values) // 2
    if len(ordered) % 2:
        return ordered[half]
    low, high = ordered[half - 1 : half + 1]
    return math.sqrt(low * high) if low > 0 else (low + high) / 2


def middle_half(values):
    """Return the mean of the values between the quartiles; the outermost count in part."""
    ordered, quarter = np.sort(values), len(values) / 4
    above = np.arange(len(values)) + 1
    shares = np.clip(np.minimum(above, above[::-1]) - quarter, 0, 1)
    return shares @ ordered / shares.sum()


def without_positions(logs, positions):
    """Return logs [arms, rounds] minus the effects of positions, found by median polish."""
    effects = np.zeros(positions.max() + 1)
    centred = logs - logs.mean(axis=0)
    for _ in range(1000):
        before = effects.copy()
        left = centred - np.median(centred - effects[positions], axis=1, keepdims=True)
        for place in np.unique(positions):
            effects[place] = np.median(left[positions == place])
        if np.abs(effects - before).max() <= 1e-9:
            break
    return logs - effects[positions]


def relabellings(blocks, runs):
    """Return signs [relabellings, blocks, 2 * runs]; row 0 has the true labels.

    Within a block the baseline's runs come first. If relabellings are sampled, the mirror image of
    each row is part of the sample too.
    """
    columns = reversed(range(2 * runs))
    of_block = np.array(
        [np.isin(range(2 * runs), chosen) * 2 - 1 for chosen in combinations(columns, runs)]
    )
    if len(of_block) ** blocks <= ENUMERATED:
        index = np.indices((len(of_block),) * blocks).reshape(blocks, -1).T
        return of_block[index]
    rng = np.random.default_rng([SEED, blocks, runs])
    index = rng.integers(len(of_block), size=(DRAWN // 2, blocks), dtype=np.uint8)
    index[0] = 0
    half = of_block[index]
    return np.concatenate([half, -half])


def number_of_relabellings(blocks, runs):
    """Return the number of rows of :func:`relabellings`."""
    count = math.comb(2 * runs, runs) ** blocks
    return count if count <= ENUMERATED else DRAWN


class Row:
    """One row of one arm: values [blocks, 2 * runs], the baseline's first, and relabellings."""

    def __init__(self, values, signs, better):
        self.values, self.better = values, better
        self.blocks, self.runs = values.shape[0], values.shape[1] // 2
        scale = self.blocks * self.runs
        self.means = np.tensordot(signs, values, 2) / scale
        self.shares = signs[:, :, self.runs :].sum(axis=(1, 2)) / scale  # of a true effect
        self.mean = self.means[0]
        self.always = np.abs(self.shares) > 1 - 1e-9  # the true labels and their mirror image
        self.df = self.blocks * (2 * self.runs - 1) - 1
        within = values - values.mean(axis=1, keepdims=True)
        squares = (within**2).sum()
        left = squares - scale / 2 * self.mean**2  # after the mean difference is subtracted
        self.left = left if left > 1e-13 * squares else 0.0
        self.residuals = self.means - self.mean * self.shares
        # The variance of a mean difference over all relabellings is left / (scale / 2 (df + 1)).
        self.scale = scale
        self.standardised = (
            np.abs(self.residuals) * math.sqrt(scale / 2 * (self.df + 1) / self.left)
            if self.left
            else np.zeros(len(signs))
        )

    def distances(self, others):
        """Return the relabellings' distances below and above the mean, each in descending order.

        A relabelling counts for the shifts up to its distance from the mean. ``others``: for each
        relabelling, the largest standardised statistic of the other rows, or None.
        """
        sides = []
        for residual in (self.residuals, -self.residuals):
            with np.errstate(divide="ignore", invalid="ignore"):
                own = np.maximum(residual / (1 - self.shares), -residual / (1 + self.shares))
            own = np.where(self.always, np.inf, np.maximum(own, 0))
            if others is not None:
                explained = np.minimum(others**2 / (self.df + 1), 1.0)
                with np.errstate(divide="ignore", invalid="ignore"):
                    theirs = np.sqrt(explained / (1 - explained) * self.left / (self.scale / 2))
                own = np.maximum(own, np.where(1 - explained > 1e-12, theirs, np.inf))
            sides.append(np.sort(own)[::-1])
        return sides

    def p(self, shift, sides, families=1):
        """Return the p of "the effect is ``shift``"."""
        below, above = sides
        side, distance = (
            (below, self.mean - shift) if shift < self.mean else (above, shift - self.mean)
        )
        edge = 1e-12 * max(1.0, abs(self.mean), abs(shift))
        return min(1.0, families * float(np.mean(side >= distance - edge)))

    def interval(self, sides, alpha):
        """Return the limits (percent) of the shifts with p above ``alpha``, or (None, None)."""
        index = math.floor(alpha * len(self.means) + 1e-9)
        if index >= len(self.means) or not np.isfinite(sides[0][index]):
            return None, None
        return percent(self.mean - sides[0][index]), percent(self.mean + sides[1][index])

    def alpha_row(self, largest, alpha):
        """Return the row's own level.

        ``largest``: for each relabelling, the largest standardised statistic of all rows.
        """
        index = math.floor(alpha * len(largest) + 1e-9)
        if index < 2:
            return 0.0
        if largest.max() == 0:
            return alpha
        critical = np.sort(np.where(self.always, np.inf, largest))[::-1][index]
        explained = critical**2 / (self.df + 1)
        if explained >= 1:
            return 0.0
        return 2 * stdtr(self.df, -math.sqrt(self.df * explained / (1 - explained)))

    @property
    def sd(self):
        """The standard deviation between runs after block and arm effects are removed.

        None if there are no degrees of freedom.
        """
        return None if self.df == 0 else math.sqrt(self.left / self.df)

    @property
    def hodges_lehmann(self):
        """The median of the Walsh averages of the differences within blocks."""
        base, arm = self.values[:, : self.runs], self.values[:, self.runs :]
        differences = (arm[:, :, None] - base[:, None, :]).ravel()
        first, second = np.triu_indices(len(differences))
        return np.median((differences[first] + differences[second]) / 2)

    def mde(self, alpha_row):
        """Return the smallest detectable effect in percent, or None if it is not known."""
        if self.df == 0 or not 0 < alpha_row < 1:
            return None
        c, t = stdtrit(self.df, 1 - alpha_row / 2), stdtrit(self.df, 0.8)
        m = math.sqrt(2 / self.df) * math.exp(gammaln((self.df + 1) / 2) - gammaln(self.df / 2))
        # (k m - c m)^2 = t^2 (1 + (k^2 + c^2) (1 - m^2)), as a polynomial in k
        square = m**2 - t**2 * (1 - m**2)
        k = max(np.roots([square, -2 * c * m**2, (c * m) ** 2 - t**2 * (1 + c**2 * (1 - m**2))]))
        return percent(k * self.sd * math.sqrt(2 / self.scale))


def percent(log_ratio):
    """Convert a log ratio to percent."""
    return 100 * math.expm1(log_ratio)


class Cell:
    """The files of a cell: its declared design, its arms and its records (before a block)."""

    def __init__(self, folder, before=math.inf):
        self.design = read_json(folder / "cell.json")["design"]
        arms = [read_json(path) for path in (folder / "arms").glob("*.json")]
        self.roles = {arm["arm"]: arm["role"] for arm in arms}
        (self.baseline,) = (name for name, role in self.roles.items() if role == "baseline")
        self.tested = [name for name, role in self.roles.items() if role == "arm"]
        records = [read_json(path) for path in (folder / "runs").glob("*.json")]
        records = [record for record in records if record["block"] < before]
        self.records = sorted(records, key=lambda r: (r["block"], r["position"], r["arm"]))
        self.interleaved = self.design["isolation"] in ("in_process", "live")
        self.runs = self.design["runs_per_block"]
        done = len({r["block"] for r in self.records})
        looks = {look["blocks"]: look["alpha"] for look in self.design["looks"]}
        self.alpha = looks[done] if looks else self.design["alpha"]
        taken = [self.design] if before == math.inf else self.design["looks_taken"]
        # Cases out of reach have an estimate, and are in no family.
        self.estimates = {
            case
            for one in taken
            if before in (math.inf, one["blocks"])
            for case in one.get("estimates", ())
        }
        if self.interleaved and self._stalls_are_kept():
            for record in self.records:
                for case in record["cases"]:
                    for metric in case["metrics"]:
                        times = case["notes"].get("as_measured", {})
                        if metric["name"] in times:
                            metric["repeats"] = [times[metric["name"]]]

    def _stalls_are_kept(self):
        """Return whether the times of requests count as measured, with stalls."""
        stalls = {}
        for record in self.records:
            noted = record["notes"].get("stalls", {})
            if "of_s" in noted:
                share = noted["seconds"] / noted["of_s"] if noted["of_s"] else 0.0
                stalls.setdefault(record["arm"], {})[record["block"]] = share, noted["steps"]
        if not any(any(pair) for blocks in stalls.values() for pair in blocks.values()):
            return False
        measured = {r["arm"] for r in self.records if r["outcome"] in ("ok", "vacuous")}
        if measured - stalls.keys():  # a server's times are never without stalls
            return True
        if self.baseline not in stalls:
            return False
        base, tested = stalls[self.baseline], [arm for arm in self.tested if arm in stalls]
        differences = [
            np.array([np.subtract(stalls[arm][b], base[b]) for b in base if b in stalls[arm]])
            for arm in tested
        ]
        smallest = [2 / number_of_relabellings(len(one), 1) for one in differences]
        if max(smallest, default=2 / number_of_relabellings(len(base), 1)) > 0.05:
            return True
        for one, least in zip(differences, smallest, strict=True):
            limit = max(0.005, least * len(tested)) if least * len(tested) <= 0.01 else 0.0
            if signed_rank_p(one) * len(tested) <= limit:
                return True
        return False

    def rows(self):
        """Return, by (case, metric): better, primary, and runs by block and arm."""
        rows = {}
        for record in self.records:
            if record["outcome"] not in ("ok", "vacuous"):
                continue
            for case in record["cases"]:
                for metric in case["metrics"]:
                    asked = self.design.get("metrics")  # what the ablation's answer is about
                    primary = metric["name"] in asked if asked else metric["primary"]
                    facts = (metric["better"], primary, {})
                    runs = rows.setdefault((case["case"], metric["name"]), facts)[2]
                    notes = case["notes"]
                    middle = notes.get("over_rounds", "median")
                    run = (metric["repeats"], notes.get("turns", []), middle)
                    runs.setdefault(record["block"], {}).setdefault(record["arm"], []).append(run)
        return rows

    def values(self, runs, arm):
        """Return log values [blocks, 2 * runs] of the baseline and an arm, and the blocks."""
        pair = (self.baseline, arm)
        blocks = [
            b for b in sorted(runs) if all(len(runs[b].get(a, ())) == self.runs for a in pair)
        ]
        values = []
        for block in blocks:
            base, other = ([median(run[0]) for run in runs[block][a]] for a in pair)
            logs = np.log([*base, *other])
            if self.interleaved:
                logs[1] = logs[0] + self._middle_log_ratio(runs[block], arm)
            values.append(logs)
        return np.array(values), blocks

    def _middle_log_ratio(self, runs, arm):
        logs = np.log([runs[one][0][0] for one in runs])
        positions = [runs[one][0][1] for one in runs]
        if all(len(one) == logs.shape[1] for one in positions):
            logs = without_positions(logs, np.array(positions))
        names = list(runs)
        ratios = logs[names.index(arm)] - logs[names.index(self.baseline)]
        return np.median(ratios) if runs[arm][0][2] == "median" else middle_half(ratios)


def signed_rank_p(differences):
    """Return the smaller of two signed-rank p (share and number of stalled steps)."""
    signs = relabellings(len(differences), 1)[:, :, 1]
    p = []
    for column in differences.T:
        sizes = np.abs(column)
        ranks = np.array([(np.sum(sizes < x) + np.sum(sizes <= x) + 1) / 2 for x in sizes])
        sums = np.abs(signs @ (np.sign(column) * ranks))
        p.append(np.mean(sums >= sums[0] - 1e-12 * sums.max()))
    return min(p)


def recompute(folder):
    """Return the statistics of a cell, by (case, metric, arm).

    A case that a look decided was not measured any longer, and keeps the numbers of its look.
    """
    cell = Cell(Path(folder))
    found = recompute_rows(cell)
    for look in cell.design.get("looks_taken", []):
        early = recompute_rows(Cell(Path(folder), look["blocks"])) if "stopped" in look else {}
        found |= {key: numbers for key, numbers in early.items() if key[0] in look["stopped"]}
    return found


def recompute_rows(cell):
    """Return the statistics of all rows of a cell's records."""
    rows, found = cell.rows(), {}
    tested = {key: row for key, row in rows.items() if key[0] not in cell.estimates}
    for arm in [*cell.tested, *(name for name, role in cell.roles.items() if role == "control")]:
        families = len(cell.tested) if arm in cell.tested else 1
        for primary in (True, False):
            found |= compare(cell, tested, arm, families, primary)
        for key in rows.keys() - tested.keys():
            found |= compare(cell, {key: rows[key]}, arm, 1, rows[key][1])
    return found


# Metrics that follow from sizes and counts. If every run of an arm gave the same value, no test.
COMPUTED = {"row_steps", "peak_kv_bytes", "kv_waste_pct", "shape_repeated_pct"}
COMPUTED |= {"taken_pct", "left_pct", "ceiling_pct", "kv_tokens"}


def is_computed(metric, runs):
    """Return whether a row has a computed metric with one value per arm."""
    values = {}
    for block in runs.values():
        for arm, measured in block.items():
            values.setdefault(arm, set()).update(median(run[0]) for run in measured)
    return metric in COMPUTED and all(len(found) == 1 for found in values.values())


def compare(cell, rows, arm, families, primary):
    """Return the statistics of one arm in one family of rows."""
    values = {}
    for key, (_, is_primary, runs) in rows.items():
        repeats = [
            x for block in runs.values() for arms in block.values() for r in arms for x in r[0]
        ]
        positive = (
            min(repeats) > 0
            if cell.interleaved
            else all(
                median(run[0]) > 0
                for block in runs.values()
                for arms in block.values()
                for run in arms
            )
        )
        if is_primary == primary and positive and not is_computed(key[1], runs):
            table, blocks = cell.values(runs, arm)
            if blocks:
                values[key] = table, blocks
    if not values:
        return {}
    every = sorted({block for _, blocks in values.values() for block in blocks})
    signs = relabellings(len(every), cell.runs)
    family = {
        key: Row(table, signs[:, [every.index(b) for b in blocks]], rows[key][0])
        for key, (table, blocks) in values.items()
    }
    standardised = np.stack([row.standardised for row in family.values()])
    largest, found = standardised.max(axis=0), {}
    for number, (key, row) in enumerate(family.items()):
        others = np.delete(standardised, number, axis=0)
        alone = row.distances(None)
        adjusted = row.distances(others.max(axis=0)) if len(others) else alone
        alpha_row = row.alpha_row(largest, cell.alpha / families)
        margins = [math.log1p(sign * cell.design["margin_pct"] / 100) for sign in (-1, 1)]
        inside = margins[0] < row.mean < margins[1]
        better = 1 if row.better == "higher" else -1
        wins = better * (row.values[:, row.runs :].mean(1) - row.values[:, : row.runs].mean(1)) > 0
        low, high = row.interval(adjusted, cell.alpha / families)
        raw_low, raw_high = row.interval(alone, cell.alpha)
        found[(*key, arm)] = {
            "effect_pct": percent(row.hodges_lehmann),
            "ci_low_pct": low,
            "ci_high_pct": high,
            "level": 1 - cell.alpha,
            "ci_raw_low_pct": raw_low,
            "ci_raw_high_pct": raw_high,
            "p": row.p(0.0, alone),
            "p_adjusted": row.p(0.0, adjusted, families),
            "p_floor": min(1.0, 2 * families / number_of_relabellings(row.blocks, row.runs)),
            "equivalence_p": max(row.p(x, adjusted, families) for x in margins) if inside else 1.0,
            "mde_pct": row.mde(alpha_row),
            "alpha_row": alpha_row,
            "sd": row.sd,
            "wins": int(wins.sum()),
            "blocks": row.blocks,
        }
    return found


def print_numbers(cell):
    """Print the recomputed numbers of a cell."""
    for (case, metric, arm), numbers in recompute(cell).items():
        print(f"{case}, {metric}, {arm}")
        for name, value in numbers.items():
            print(f"    {name:15} {value if value is None else format(value, '.10g')}")


def main(study):
    """Print the recomputed numbers of a study's archive, or of the folder of a cell."""
    if not zipfile.is_zipfile(study):
        return print_numbers(study)
    with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(study) as archive:
        for name in archive.namelist():
            if name.endswith(CELL_SUFFIX):
                with tarfile.open(fileobj=archive.open(name)) as records:
                    # Python before 3.11.4 has no filter: give it no archive of a stranger's.
                    records.extraction_filter = getattr(tarfile, "data_filter", None)
                    records.extractall(folder)
                print_numbers(Path(folder, name.removesuffix(CELL_SUFFIX)))


if __name__ == "__main__":
    main(sys.argv[1])
