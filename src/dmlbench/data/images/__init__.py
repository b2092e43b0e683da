"""Where pixels come from: files, the cache of resized images, or arrays in memory."""
