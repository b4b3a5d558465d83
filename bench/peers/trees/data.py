"""Data sets of the benchmark, generated once and kept in a folder."""

from pathlib import Path

import numpy as np

# rows, columns, classes
SHAPES = {
    "a": (1_000_000, 28, 2),
    "b": (1_000_000, 28, 2),
    "c": (400_000, 50, 5),
    "d": (160_000, 1000, 2),
}


def prepare(folder: Path, name: str, scale: float):
    """Writes train and test files of a data set, unless they exist."""
    done = folder / f"{name}-{scale}.done"
    if done.exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    if name in SHAPES:
        rows, columns, classes = SHAPES[name]
        rows = int(rows * scale)
        rng = np.random.default_rng(7)
        x, y = (sparse if name == "d" else dense)(rng, rows + rows // 5, columns, classes)
        if name == "b":
            x[rng.random(x.shape, dtype=np.float32) < 0.3] = np.nan
        cut = rows
    else:
        import sklearn.datasets

        loaded = getattr(sklearn.datasets, f"load_{name}")()
        order = np.random.default_rng(1).permutation(len(loaded.target))
        x, y = loaded.data[order].astype(np.float32), loaded.target[order].astype(np.float32)
        cut = len(y) * 4 // 5
    for part, rows in (("train", slice(0, cut)), ("test", slice(cut, None))):
        write(folder, f"{name}-{part}", x[rows], y[rows])
    done.touch()


def dense(rng, rows, columns, classes):
    x = rng.standard_normal((rows, columns), dtype=np.float32)
    weights = rng.standard_normal((columns, classes)).astype(np.float32)
    score = x @ weights + 2 * np.sin(3 * x[:, :classes]) + x[:, classes : 2 * classes] * x[:, :classes]
    if classes == 2:
        p = 1 / (1 + np.exp(-0.5 * (score[:, 0] - score[:, 1])))
        return x, (rng.random(rows) < p).astype(np.float32)
    noise = rng.gumbel(size=score.shape).astype(np.float32)
    return x, np.argmax(score + 1.5 * noise, axis=1).astype(np.float32)


def sparse(rng, rows, columns, _):
    """A matrix in which 1% of the entries have a value."""
    import scipy.sparse

    x = scipy.sparse.random(rows, columns, 0.01, "csr", np.float32, rng)
    weights = rng.standard_normal(columns).astype(np.float32) * 3
    score = x @ weights
    p = 1 / (1 + np.exp(-(score - score.mean())))
    return x, (rng.random(rows) < p).astype(np.float32)


def write(folder: Path, name: str, x, y):
    np.save(folder / f"{name}-y.npy", y)
    if isinstance(x, np.ndarray):
        np.save(folder / f"{name}-x.npy", x)
        return
    import scipy.sparse

    scipy.sparse.save_npz(folder / f"{name}-x.npz", x, compressed=False)
    with open(folder / f"{name}-x.libsvm", "w") as out:
        for row in range(x.shape[0]):
            at = slice(x.indptr[row], x.indptr[row + 1])
            pairs = sorted(zip(x.indices[at], x.data[at]))
            out.write(f"{y[row]:g} " + " ".join(f"{i}:{v:.7g}" for i, v in pairs) + "\n")


def load(folder: Path, name: str):
    """The values and labels of a file."""
    y = np.load(folder / f"{name}-y.npy")
    path = folder / f"{name}-x.npz"
    if path.exists():
        import scipy.sparse

        return scipy.sparse.load_npz(path), y
    return np.load(folder / f"{name}-x.npy"), y
