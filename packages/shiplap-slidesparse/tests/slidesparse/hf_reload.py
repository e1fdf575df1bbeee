"""Run by test_hf.py in a process of its own: what importing does, and the logits of saved models, each in a file."""

import importlib
import sys
from pathlib import Path

import torch

if __name__ == "__main__":
    for name in [n for n in sys.modules if n.partition(".")[0] == "triton"]:
        del sys.modules[name]  # torch's compiler had imported it before this process was forked
    asked = torch.cuda.is_available, torch.cuda.current_device
    torch.cuda.is_available = torch.cuda.current_device = None  # type: ignore[assignment]  # whoever asks ends here
    importlib.import_module("shiplap_slidesparse")
    torch.cuda.is_available, torch.cuda.current_device = asked
    print("transformers" in sys.modules)
    print("triton" in sys.modules)
    print("slidesparse" in Path("/proc/self/maps").read_text())  # a library
    hf = importlib.import_module("shiplap_slidesparse.hf")
    auto = importlib.import_module("transformers.quantizers.auto")
    print("slidesparse" in auto.AUTO_QUANTIZER_MAPPING)
    hf.register()
    models = importlib.import_module("tests.slidesparse.models")
    for folder in sys.argv[1:]:
        model = importlib.import_module("transformers").AutoModelForCausalLM.from_pretrained(folder).eval()
        with torch.no_grad():
            torch.save(model(models.TOKENS).logits, f"{folder}/logits.pt")
