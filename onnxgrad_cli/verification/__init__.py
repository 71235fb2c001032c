"""What is proven and how: gradients held against differences on two runtimes that know nothing of our rules."""
