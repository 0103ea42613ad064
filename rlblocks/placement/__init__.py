"Where wrappers live (this process, torchrun, Ray), and whether they fit there."
