"Every loss, each its equation: policy, value, preference, reward model, distillation."
