"`Policy`, `Critic` and `Scorer`: loading, forward pass, output layer, LoRA."
