"Episodes with environments, tools and users, and the rows that they become."
