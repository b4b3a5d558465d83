#!/usr/bin/env python3
"""Exchanges models with the installed XGBoost in both directions and compares predictions and contributions.

    PYTHON bench/peers/trees/compatible.py --lockstep target/release/lockstep

Run it with the Python of each version of XGBoost that should be checked.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import xgboost as xgb

ROWS, COLUMNS = 2000, 6
OBJECTIVES = {
    "squared_error": "reg:squarederror",
    "logistic": "binary:logistic",
    "softmax": "multi:softprob",
    "poisson": "count:poisson",
    "absolute_error": "reg:absoluteerror",
    "rank": "rank:ndcg",
}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lockstep", type=Path, default=Path("target/release/lockstep"))
    args = parser.parse_args()
    worst = {"predictions": 0.0, "contributions": 0.0}
    with tempfile.TemporaryDirectory() as folder:
        for name, theirs in OBJECTIVES.items():
            check(args.lockstep.resolve(), Path(folder), name, theirs, worst)
    print(f"xgboost {xgb.__version__}: largest difference of predictions {worst['predictions']:.2g}, "
          f"of contributions {worst['contributions']:.2g}")
    if worst["predictions"] > 1e-6 or worst["contributions"] > 1e-5:
        sys.exit("the differences are too large")


def check(lockstep, folder, name, theirs, worst):
    rng = np.random.default_rng(3)
    x = rng.standard_normal((ROWS, COLUMNS)).astype(np.float32)
    x[rng.random(x.shape) < 0.2] = np.nan
    score = np.nan_to_num(x[:, 0]) + np.nan_to_num(x[:, 1]) * 2 + 0.1 * rng.standard_normal(ROWS)
    y = {
        "logistic": score > 0,
        "softmax": np.clip(np.floor(score + 1.5), 0, 2),
        "poisson": np.floor(np.clip(score, 0, None)),
        "rank": np.clip(np.floor(score + 1.5), 0, 3),
    }.get(name, score).astype(np.float32)
    group = np.repeat(np.arange(ROWS // 20), 20).astype(np.float32)
    for file, array in (("x", x), ("y", y), ("q", group)):
        np.save(folder / f"{file}.npy", array)
    matrix = xgb.DMatrix(x)

    # Ours in XGBoost.
    classes = 'classes = 3\n' if name == "softmax" else ""
    grouped = 'group = "q.npy"\n' if name == "rank" else ""
    (folder / "t.toml").write_text(
        f'[data]\ntrain = "{folder}/x.npy"\nlabel = "y.npy"\n{grouped}'
        f'[trees]\nobjective = "{name}"\nrounds = 20\n{classes}[run]\nthreads = 1\n'
    )
    run(lockstep, "trees", "train", folder / "t.toml", "--runs", folder, "--set", f"name={name}")
    ours = predict(lockstep, folder / name, folder)
    shap = predict(lockstep, folder / name, folder, "--contributions")
    for suffix in ("json", "ubj"):
        booster = xgb.Booster()
        booster.load_model(folder / name / f"model.{suffix}")
        compare(worst, "predictions", booster.predict(matrix), ours)
        compare(worst, "contributions", booster.predict(matrix, pred_contribs=True), shap)

    # XGBoost's in ours.
    params = {"objective": theirs, "tree_method": "hist", "eta": 0.3, "verbosity": 0, "nthread": 1}
    if name == "softmax":
        params["num_class"] = 3
    labeled = xgb.DMatrix(x, y)
    if name == "rank":
        labeled.set_group([20] * (ROWS // 20))
    booster = xgb.train(params, labeled, 20)
    for suffix in ("json", "ubj"):
        path = folder / f"theirs-{name}.{suffix}"
        booster.save_model(path)
        compare(worst, "predictions", booster.predict(matrix), predict(lockstep, path, folder))
        shap = predict(lockstep, path, folder, "--contributions")
        compare(worst, "contributions", booster.predict(matrix, pred_contribs=True), shap)


def predict(lockstep, model, folder, *flags):
    out = folder / "out.npy"
    run(lockstep, "trees", "predict", model, folder / "x.npy", "-o", out, "--threads", "1", *flags)
    return np.load(out)


def compare(worst, what, theirs, ours):
    scale = max(1.0, float(np.abs(theirs).max()))
    difference = float(np.abs(theirs.reshape(-1) - ours.reshape(-1)).max()) / scale
    worst[what] = max(worst[what], difference)


def run(*command):
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{' '.join(map(str, command))}: {done.stderr}")


if __name__ == "__main__":
    main()
