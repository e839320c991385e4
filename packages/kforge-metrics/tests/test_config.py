from __future__ import annotations

import subprocess
import sys

import pytest

import kforge_metrics
from kforge_metrics import MetricsConfig


def test_wrong_values_are_named() -> None:
    with pytest.raises(ValueError, match=r"metrics\.every_steps = 0"):
        MetricsConfig(every_steps=0)


def test_config_events_and_sinks_need_no_torch() -> None:
    code = (
        "import sys; sys.modules['torch'] = None; import kforge_metrics.config; "
        "from kforge_metrics import MetricsConfig, Event, JsonlSink, ConsoleSink, read_events, get_logger, peak_flops; "
        "print(peak_flops('NVIDIA H200'), MetricsConfig().every_steps)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.split() == [str(989e12), "10"]


def test_public_names_exist_and_say_what_they_are() -> None:
    for name in kforge_metrics.__all__:
        value = getattr(kforge_metrics, name)
        assert name == "__version__" or value.__doc__, name
    with pytest.raises(AttributeError, match="no_such_name"):
        kforge_metrics.no_such_name  # noqa: B018
