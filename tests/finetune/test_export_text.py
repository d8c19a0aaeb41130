"""A decoder that was trained from scratch, exported: transformers continues a text as
scripts/generate.py does.
"""

import pytest

from tests import needs, running
from tests.finetune import extras

pytestmark = [pytest.mark.slow, pytest.mark.guarantee]
PROMPT = "line 3 of file"
TOKENS = 24
CONTINUE = """
import sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
folder, prompt, tokens = sys.argv[1:]
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
inputs = tokenizer(prompt, return_tensors="pt")
ids = model.generate(**inputs, max_new_tokens=int(tokens), do_sample=False)
print(tokenizer.decode(ids[0], skip_special_tokens=True))
"""


def test_transformers_continues_a_text_as_the_run_does(corpus, tmp_path):
    needs.extra("transformers")
    running.train(
        "run.name=run", "data.context=64", "trainer.max_steps=60", cwd=tmp_path, corpus=corpus
    )
    run, out = tmp_path / "outputs" / "run", tmp_path / "out"
    assert (
        "its logits are the run's"
        in running.script("convert.py", str(run), str(out), cwd=tmp_path).stdout
    )
    words = [
        "--prompt",
        PROMPT,
        "--temperature",
        "0",
        "--tokens",
        str(TOKENS),
        "--accelerator",
        "cpu",
    ]
    found = running.script("generate.py", str(run), *words, cwd=tmp_path).stdout
    assert found == extras.run("-c", CONTINUE, out, PROMPT, str(TOKENS)).stdout
    assert len(found) > len(PROMPT) + 10
