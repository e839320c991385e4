from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

import kforge_resilience
from kforge_resilience import ResilienceConfig


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"stop_signals": ("SIGTREM",)}, "resilience.stop_signals: 'SIGTREM' .* did you mean SIGTERM"),
        ({"stop_signals": ("SIGKILL",)}, "SIGKILL cannot be caught"),
        ({"nonfinite": "skp"}, "resilience.nonfinite = 'skp'"),
        ({"max_skipped_in_a_row": -1}, "resilience.max_skipped_in_a_row = -1"),
    ],
)
def test_wrong_values_are_named(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ResilienceConfig(**values)


def test_config_and_exit_codes_need_no_torch() -> None:
    code = "import sys; sys.modules['torch'] = None; import kforge_resilience.config, kforge_resilience.exitcodes"
    code += "; from kforge_resilience import ResilienceConfig, exitcodes; print(exitcodes.STOPPED, ResilienceConfig())"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == f"75 {ResilienceConfig()}"


def test_public_names_exist_and_say_what_they_are() -> None:
    for name in kforge_resilience.__all__:
        value = getattr(kforge_resilience, name)
        assert name == "__version__" or value.__doc__, name
    with pytest.raises(AttributeError, match="no_such_name"):
        kforge_resilience.no_such_name  # noqa: B018
