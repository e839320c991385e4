import sys
from pathlib import Path

from kforge_testing import preload

sys.path.insert(0, str(Path(__file__).parent))  # toy.py, under importlib import mode
preload("kforge_parallel.build", "kforge_parallel.testing", "transformers.models.llama.modeling_llama")
