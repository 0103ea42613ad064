"Engines that sample: transformers in this process, vLLM in a process of its own, SGLang over HTTP."
