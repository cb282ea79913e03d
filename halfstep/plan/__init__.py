"""What a model trains in: policies, rules, op changes and plans, all frozen; nothing here touches a model."""
