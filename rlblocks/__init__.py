"Building blocks for reinforcement learning on language models."
