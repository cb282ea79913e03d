"""How a model trains, as frozen values: policies, rules, op changes and plans; nothing here changes a model."""
