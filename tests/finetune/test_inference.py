"""What an exported folder says of where a text ends."""

import json

from armature.finetune import export, folder
from tests.data import chat_parts
from tests.finetune.folders import write_model


def test_an_exported_adapter_keeps_the_end_of_its_base(tmp_path):
    kept, run, adapter = (
        write_model(tmp_path / "kept", eos_token_id=2),
        tmp_path / "run",
        tmp_path / "adapter",
    )
    chat_parts.folder(run)
    adapter.mkdir()
    export.write_tokenizer(kept, run, adapter)
    end = chat_parts.small_tokenizer().token_to_id("<|im_end|>")
    assert json.loads((adapter / "generation_config.json").read_text()) == {
        "eos_token_id": [2, end]
    }
    assert not (adapter / folder.CONFIG).exists()
