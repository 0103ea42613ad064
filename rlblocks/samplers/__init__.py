"Engines that sample: this process, vLLM, SGLang."
