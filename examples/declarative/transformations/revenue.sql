create materialized view revenue
comment 'What was ordered and not cancelled, per item.'
as
select item, count(*) as orders, sum(cents) as cents
from orders
where type = 'order.placed'
  and order not in (select c.order from orders c where c.type = 'order.cancelled')
group by item;
