"""A tiny language model that comes with Quire, so that the quickstart needs no download."""

from pathlib import Path

PATH = Path(__file__).parent
"""The checkpoint folder, in the format of Hugging Face transformers."""

NAME = "quire-demo"
"""Its name for clients."""

SYSTEM_PROMPT = (PATH / "system_prompt.txt").read_text(encoding="utf-8").strip()
"""The instructions under which the model was trained to answer."""

QUESTIONS = tuple((PATH / "questions.txt").read_text(encoding="utf-8").splitlines())
"""Questions that it answers well."""
