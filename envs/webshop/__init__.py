"""WebShop-v0: search a shop, look at products, choose options, buy what was asked for; nobody enters."""
