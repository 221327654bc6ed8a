"""Run ``leaven`` with a demo that takes seconds: `small_demo.py demo --run DIR`. It has two widths and one layer."""

from leaven import demo

CHANGES = {"model.n_layers": 1, "data.tokens": 1_024, "schedule.warmup_tokens": 256, "evaluation.tokens": 512}
_RECIPE = demo.base_recipe().replace(CHANGES)


def shrink() -> None:
    demo.base_recipe = lambda: _RECIPE
    demo.SIZES["full"] = demo.Size((48, 96), (0.008, 0.016, 0.032), seeds=2)
    demo.SIZES["quick"] = demo.Size((48, 96), (0.008, 0.016), seeds=2)


if __name__ == "__main__":
    from leaven.cli import main

    shrink()
    main()
