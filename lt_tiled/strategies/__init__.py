"""The bases of the strategies, a file per engine. ``NOTE [Namespaces]`` says how strategies are made of them."""
