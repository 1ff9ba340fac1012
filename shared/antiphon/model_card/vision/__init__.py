"""How models take images and videos: a module for each way to scale or cut them."""
