// The job of tests/support/mqtt_programs.py, done by paho of Go.
package main

import (
	"bufio"
	"fmt"
	"os"
	"time"

	mqtt "github.com/eclipse/paho.mqtt.golang"
)

func job(name string) string { return os.Getenv("MQTT_" + name) }

func main() {
	qos := job("QOS")[0] - '0'
	options := mqtt.NewClientOptions()
	options.AddBroker("tcp://" + job("HOST") + ":" + job("PORT"))
	options.SetClientID(job("NAME")).SetUsername(job("NAME")).SetPassword(job("SECRET"))
	options.SetCleanSession(false)
	store := mqtt.NewMemoryStore()
	options.SetStore(store)
	options.SetConnectRetry(true).SetConnectRetryInterval(200 * time.Millisecond)
	options.SetMaxReconnectInterval(time.Second)
	options.SetDefaultPublishHandler(func(_ mqtt.Client, message mqtt.Message) {
		fmt.Println("command", string(message.Payload()))
	})
	options.SetOnConnectHandler(func(client mqtt.Client) {
		fmt.Println("connected")
		if job("COMMANDS") == "" {
			return
		}
		go func() {
			// If this connection breaks before, the next one subscribes.
			if token := client.Subscribe(job("COMMANDS"), qos, nil); token.Wait() && token.Error() == nil {
				fmt.Println("subscribed")
			}
		}()
	})
	client := mqtt.NewClient(options)
	client.Connect()
	readings := bufio.NewScanner(os.Stdin)
	for readings.Scan() {
		reading := readings.Text()
		token := client.Publish(job("TOPIC"), qos, false, reading)
		go func() {
			token.Wait()
			// A token ends too soon where a write fails, and where the next connection sends the message again. The
			// client's store has the message until it is acknowledged.
			kept := fmt.Sprintf("o.%d", token.(*mqtt.PublishToken).MessageID())
			for store.Get(kept) != nil {
				time.Sleep(20 * time.Millisecond)
			}
			fmt.Println("acknowledged", reading)
		}()
	}
}
